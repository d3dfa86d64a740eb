"""HTTP: app, errors, middleware, events."""
