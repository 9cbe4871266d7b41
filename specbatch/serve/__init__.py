"""`specbatch serve-batches`: files and batches of OpenAI's API on this machine, on top of the file job."""
