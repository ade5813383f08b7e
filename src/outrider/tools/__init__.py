"""What measures, diagnoses and trains: nothing here runs while a request is served."""
