"""What a measurement is: requests, arguments, timing, checks of results, causes of failure."""
