"""Passes from Graph to Plan: each takes a value and a Target and returns a value; pipeline.py has them in order."""
