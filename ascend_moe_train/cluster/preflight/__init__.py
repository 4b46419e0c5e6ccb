"""Whether the hosts of a job are fit for it: what is asked of them, how it is judged, and how it is shown."""
