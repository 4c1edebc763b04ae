"""Runs on disk: how one begins or resumes, and what it was and did."""
