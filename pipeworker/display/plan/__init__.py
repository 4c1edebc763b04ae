"""The displays of a plan: tables, timelines and pictures of a step before it runs. Pure."""
