"""Front end: the Ray Serve application, its configuration, HTTP API and command line."""
