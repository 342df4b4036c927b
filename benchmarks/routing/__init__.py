"""What choosing the route of each turn is worth, against always taking the same one."""
