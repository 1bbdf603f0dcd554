"""What is known of this machine without torch: what its processor computes, and how processes share its cards.

Workers ask before any trial runs. No other room may be imported.
"""
