"""`moesaic fuzz`: give every file reader and every command line malformed and unexpected inputs."""
