"""Optimizers and schedules of the learning rate."""
