"""The job's model: described as a whole, built in part."""
