"""Studies of what trained models do with long documents: pages to read, and the numbers behind them."""
