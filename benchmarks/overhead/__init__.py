"""What a router adds to a turn whose engines take no time."""
