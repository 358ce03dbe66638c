"""Mathematical functions of vectors, as arithmetic."""
