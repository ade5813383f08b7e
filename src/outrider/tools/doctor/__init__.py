"""The checks of `outrider doctor`: environment, model, memory, drafter, and whether speculation changes the text."""
