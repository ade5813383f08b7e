"""The front end's side of the engine: its process, the requests that are open in it, what came back."""
