"""Output of a job: rank 0 live on the screen, everything in logs."""
