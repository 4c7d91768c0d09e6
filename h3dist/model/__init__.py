"""The H3 denoiser as one device sees it: its rows, its heads, its slice of the feed-forward layers."""
