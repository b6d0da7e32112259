"""The Channels consumers: how bytes of the views' generators get out, and frames come in."""
