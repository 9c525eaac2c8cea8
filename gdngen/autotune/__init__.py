"""Tuning: measurements of this machine, candidates, decisions."""
