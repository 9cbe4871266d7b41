"""`specbatch report`: one HTML file that shows what a job did."""
