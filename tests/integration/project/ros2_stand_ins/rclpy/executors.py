class ExternalShutdownException(Exception):
    """Raised by `spin` when somebody else shuts ROS down."""
