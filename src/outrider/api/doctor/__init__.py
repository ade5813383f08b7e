"""What `outrider doctor` looks at: the environment, the model, and whether speculation changes anything."""
