"""Training: the loss, the loop, and the recipe of the built-in language model. Needs the extra `verax[train]`."""
