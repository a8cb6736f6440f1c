"""EleutherAI's lm-evaluation-harness on trained models: the command, and in `model` the class that it finds by name."""
