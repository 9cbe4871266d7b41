"""The file job: read rows, run them through a `BatchEngine`, write results that survive a crash."""
