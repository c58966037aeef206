"""What trials try: samplers by name, what a study begins with, duplicates, goals, and which trials are best."""
