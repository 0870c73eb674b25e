"""Other APIs: each module turns its bodies into what a chat's handler takes, and what happens into its own events."""
