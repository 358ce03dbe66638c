"""``placement="auto"``: a cost model and the search for the plan it thinks best."""
