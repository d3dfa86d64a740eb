"""Files of work: lines in, results appended as they come, and a start that goes on where a run stopped."""
