"""Faults and attacks on real jobs, and damaged data."""
