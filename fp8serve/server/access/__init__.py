"""Who may do what here, and how much: keys, scopes, and the limits of tenants."""
