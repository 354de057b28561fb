"""Fine-tune jobs: the table that survives a restart, their directories, and the process that one runs in."""
