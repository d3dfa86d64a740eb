"""The earlier ports' tables, measured again: `verax bench reports`."""
