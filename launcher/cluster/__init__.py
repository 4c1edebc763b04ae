"""Jobs on clusters: rendered as Slurm or Kubernetes take them (pure), handed over, run there."""
