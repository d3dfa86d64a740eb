"""One engine over several hosts: rank 0 schedules, and sends each dispatch to followers, which repeat it."""
