"""Files of work: lines in, results appended as they come, and a run that continues where an earlier one stopped."""
