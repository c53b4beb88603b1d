"""What a step costs: FLOPs, roofline time, utilisation."""
