"""`verax batch --ray`: the lines of a file over replicas."""
