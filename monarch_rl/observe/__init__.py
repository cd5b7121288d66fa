"""What a run tells: metrics, timeline, console."""
