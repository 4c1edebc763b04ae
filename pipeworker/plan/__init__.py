"""The plan of a job: partition, placement, schedules, checks. Pure, and without torch."""
