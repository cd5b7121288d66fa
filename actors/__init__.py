"""The Monarch actors: endpoints, ownership and lifecycle. What they do is in `monarch_rl`."""
