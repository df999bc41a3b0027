//go:build cgo

package slack

import "C"
