"""What the loaders of all drafters share: opening a checkpoint, fitting it to the target, a reduced vocabulary."""
