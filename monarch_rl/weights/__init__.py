"""From the trainer's shards to the generator's parameters: what is copied where, through which memory, and when."""
