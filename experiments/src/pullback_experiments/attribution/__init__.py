"""Attribution of predictions to training samples, and uncertainty: records of `pb.curvature`."""
