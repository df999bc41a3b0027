package msg

// Refusal is a refusal of a field of HELLO or REGISTER, with the content of the ERROR that answers
// it.
type Refusal struct {
	Code, Field string
	Err         error
	Remedy      string
}

func (e *Refusal) Error() string { return e.Field + ": " + e.Err.Error() }
func (e *Refusal) Unwrap() error { return e.Err }
