"""The commands that are a module of their own, and what all commands share."""
