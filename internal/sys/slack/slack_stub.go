//go:build !cgo

package slack
