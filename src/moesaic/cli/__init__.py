"""The `moesaic` command, one file per subcommand."""
