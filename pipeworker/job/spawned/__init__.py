"""The folder on the import path of workers in which a spawned process finds the job's package."""
