"""`specbatch tune`: traces drafts, replays them, models costs, predicts, searches, and confirms with live runs."""
