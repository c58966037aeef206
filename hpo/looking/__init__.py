"""Looking at a study: the dashboard's gate, artifacts, notes, and what a study runs on."""
