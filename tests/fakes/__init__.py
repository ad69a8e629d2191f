"""Stand-ins for what the real server does not do on demand."""
